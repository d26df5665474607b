"""Fails at import, as a typo would."""

import no_such_module_anywhere  # noqa: F401
