"""The command line. Everything it does, it does through ``Runtime``."""
