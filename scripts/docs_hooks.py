"""MkDocs hooks that generate pages outside of docs/: the API, the config keys, and files that pages link to.

The hooks parse source files and never import ringformer, so the site can be built where JAX is not installed.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ringformer"
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(\))")
AS_TEXT = (".py", ".sh")
"""Suffixes of files that a browser would download instead of showing."""

FAMILY = {"ringformer.models.interface.ModelConfig": "ringformer.models.decoder_config.DecoderConfig"}
"""Model family whose keys the page lists for fields that can have the keys of any family."""

FIRST_ROOMS = ("ops", "models", "data", "parallel", "train", "inference", "convert", "evals", "estimate", "paper")
"""Rooms that people look up most, which are listed first. The other rooms follow by name."""


def rooms() -> list[str]:
    """Return the folders of the package."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return [*FIRST_ROOMS, *sorted(folders - set(FIRST_ROOMS))]


def purpose(room: str) -> str:
    """Return the first paragraph of a room's docstring."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page of each room to the navigation, below the API's own page."""
    pages = next(part["Reference"] for part in config.nav if "Reference" in part)
    next(page["API"] for page in pages if "API" in page).extend(f"reference/api/{room}.md" for room in rooms())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and every file outside docs/ that a page links to."""
    pages = {"reference/config.md": config_page(), "reference/api/index.md": index_page()}
    pages |= {f"reference/api/{room}.md": api_page(room) for room in rooms()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    linked = {}
    for file in files.documentation_pages():
        for _, target, _ in LINK.findall(file.content_string):
            if outside := _outside(file.src_uri, target):
                linked[_site_path(outside)] = outside
    for path, source in linked.items():
        copy = File.generated(config, path, abs_src_path=str(ROOT / source), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Turn links that leave docs/ into links to the copies of those files in the site."""

    def local(match: re.Match[str]) -> str:
        outside = _outside(page.file.src_uri, match[2])
        if outside is None:
            return match[0]
        return match[1] + posixpath.relpath(_site_path(outside), posixpath.dirname(page.file.src_uri)) + match[3]

    return LINK.sub(local, markdown)


def _outside(page: str, target: str) -> str | None:
    """Return the repository path that a link leads to, or None inside docs/. Raises PluginError if none exists."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    if path.startswith("docs/"):
        return None
    if not (ROOT / path).is_file():
        raise PluginError(f"docs/{page} links to {target}, and there is no file {path}")
    return path


def _site_path(path: str) -> str:
    return f"repository/{path}" + (".txt" if path.endswith(AS_TEXT) else "")


def modules(room: str) -> list[str]:
    """Return the dotted names of a room's modules that have a docstring."""
    names = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.read_text().lstrip().startswith('"""'):
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


def api_page(room: str) -> str:
    return f"# ringformer.{room}\n\n{purpose(room)}\n\n" + "\n\n".join(f"::: {name}" for name in modules(room)) + "\n"


def index_page() -> str:
    """List the public names of ringformer/__init__.py, then the rooms with the first line of each module."""
    package = griffe.load("ringformer", search_paths=[ROOT], allow_inspection=False)
    lines = ["# API", "", "What `import ringformer` offers:", "", "| name | |", "|---|---|"]
    for name, member in package.members.items():
        if member.is_alias and member.target_path.startswith("ringformer."):
            target = member.final_target
            lines.append(f"| [`{name}`][{target.path}] | {_first_line(target)} |")
    for room in rooms():
        lines += ["", f"## [{room}]({room}.md)", "", purpose(room), "", "| module | |", "|---|---|"]
        for name in modules(room):
            lines.append(f"| [`{name.removeprefix('ringformer.')}`][{name}] | {_first_line(package[_within(name)])} |")
    return "\n".join(lines) + "\n"


def _within(name: str) -> str:
    return name.removeprefix("ringformer.")


def _first_line(thing) -> str:
    text = thing.docstring.value if thing.docstring else ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def config_page() -> str:
    """List every key of a config with its default and docstring, from the fields of the dataclasses."""
    package = griffe.load("ringformer", search_paths=[ROOT], allow_inspection=False)
    lines = [
        "# Config keys",
        "",
        "A config is a Python file whose `get_config()` starts from `base_config(PRESET)`, which has every key below",
        "with its default, and the preset's model. Each can be overridden as `--config.KEY=VALUE`. A default of `None`",
        "means unset: inherited from the model that the run begins with, or chosen. The keys of `model` are LLaMA's.",
    ]
    sections: list[tuple[str, str, griffe.Class]] = []
    _collect(package["runs.config"].members["Config"], "", sections, package)
    for prefix, about, cls in sections:
        lines += [
            "",
            f"## {prefix.rstrip('.') or 'The run'}",
            "",
            about,
            "",
            "| key | default | meaning |",
            "|---|---|---|",
        ]
        for attribute in _fields(cls):
            if _nested(attribute, package) is None:
                default = "the&nbsp;preset's" if attribute.value is None else f"`{attribute.value}`"
                lines.append(f"| `{prefix}{attribute.name}` | {default} | {_meaning(attribute)} |")
    return "\n".join(lines) + "\n"


def _collect(cls, prefix: str, sections: list[Any], package) -> None:
    sections.append((prefix, _first_line(cls), cls))
    for attribute in _fields(cls):
        nested = _nested(attribute, package)
        if nested is not None:
            _collect(nested, f"{prefix}{attribute.name}.", sections, package)


def _fields(cls) -> list[Any]:
    """Return the fields of a dataclass, base classes first. An overridden field may inherit its docstring."""
    fields = {field.name: field for base in reversed(cls.mro()) for field in _fields(base)}
    for member in cls.members.values():
        if member.is_attribute and member.annotation is not None and "instance-attribute" in member.labels:
            if not member.docstring and member.name in fields:
                member.docstring = fields[member.name].docstring
            fields[member.name] = member
    return list(fields.values())


def _nested(attribute, package):
    """Return the dataclass that an annotation names, if the package defines it."""
    path = getattr(attribute.annotation, "canonical_path", "")
    path = FAMILY.get(path, path)
    if not path.startswith("ringformer."):
        return None
    found = package[path.removeprefix("ringformer.")]
    found = found.final_target if found.is_alias else found
    return found if found.is_class else None


def _meaning(attribute) -> str:
    """Return the docstring of a field, or the choices of its type."""
    text = _first_line(attribute)
    choices = re.findall(r"'([^']+)'", str(attribute.annotation)) if "Literal" in str(attribute.annotation) else []
    named = [choice for choice in choices if choice not in text]
    return ". ".join(filter(None, [text.rstrip("."), "one of " + ", ".join(choices) if named else ""]))
