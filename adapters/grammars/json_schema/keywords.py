"""Rules of the keywords of JSON Schema.

Keywords of all drafts hold, whatever ``$schema`` says. Annotations and unknown keywords mean
nothing (JSON Schema, core, section 6.5); one that cannot be enforced is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from adapters.grammars.json_schema.array_keywords import ARRAY_KEYWORDS
from adapters.grammars.json_schema.combining_keywords import COMBINING_KEYWORDS
from adapters.grammars.json_schema.object_keywords import OBJECT_KEYWORDS
from adapters.grammars.json_schema.solver import Rule
from adapters.grammars.json_schema.value_keywords import VALUE_KEYWORDS

RULES: Mapping[str, Rule] = {**VALUE_KEYWORDS, **ARRAY_KEYWORDS, **OBJECT_KEYWORDS, **COMBINING_KEYWORDS}
