"""The version of autotile."""

__version__ = "0.1.0"
