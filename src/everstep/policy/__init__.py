"""Pure decisions: no clock, file, thread or environment; time arrives in the event."""
