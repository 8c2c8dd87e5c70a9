"""What confines commands: ``base`` states the guarantees, ``probe`` finds the strongest level that works here."""
