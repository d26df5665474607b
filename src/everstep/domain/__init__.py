"""Pure data that every other package speaks: ids, events, commands, verdicts, causes, errors and their JSON form."""
