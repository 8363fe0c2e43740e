"""One module a family; each lists its ops in OPS."""
