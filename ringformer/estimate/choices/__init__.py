"""What may be chosen for a workload: meshes, memory settings, and their candidates."""
