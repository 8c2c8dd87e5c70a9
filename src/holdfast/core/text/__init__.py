"""Text for readers: secrets are removed from it, hidden characters are found in it, cards are built of it."""
