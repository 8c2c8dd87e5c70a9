"""Input from users: lines at the prompt, decisions on pending calls, and the parsing of typed values."""
