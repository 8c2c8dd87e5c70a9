"""Text for readers: removal of secrets, hidden characters, and the cards that notebooks show."""
