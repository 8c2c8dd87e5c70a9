"""How cards, events, live output and usage look on a terminal."""
