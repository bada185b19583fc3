"""What lies where on the device mesh: the mesh and its device order, shardings of weights, options of each platform."""
