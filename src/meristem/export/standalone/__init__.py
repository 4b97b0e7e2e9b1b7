"""Files that exported folders carry as they are: each stands alone, and imports torch and transformers only.

The import of transformers may register them (`meristem.registration`), which must not happen while one of them is half
imported: it comes first.
"""

import transformers  # noqa: F401
