"""The commands people type; the only place that chooses real or simulated parts and wires them."""
