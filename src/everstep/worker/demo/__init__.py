"""The training that `everstep demo` runs: a small GPT on real text. It uses everstep as any script would."""
