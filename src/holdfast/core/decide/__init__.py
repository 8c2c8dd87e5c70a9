"""The pure state machine: ``machine.decide`` turns an input into the events that are appended to the log."""
