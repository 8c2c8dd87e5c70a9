"""One module for each command or small family: its declaration, its help and its implementation."""
