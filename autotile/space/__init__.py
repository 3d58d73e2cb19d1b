"""The feasible set of a kernel: enumeration, limits of the device, occupancy, estimated times."""
