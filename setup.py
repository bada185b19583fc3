from setuptools import find_packages, setup

setup(packages=find_packages(include=["ringformer", "ringformer.*"]), package_data={"ringformer": ["py.typed"]})
