"""One file a package. Each is imported by its worker alone, inside that package's environment."""
