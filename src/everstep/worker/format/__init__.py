"""The files of a checkpoint, in memory and on disk alike: what lies where, and how it is known to be whole."""
