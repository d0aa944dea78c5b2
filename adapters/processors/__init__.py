"""The built-in processors, one file per family, independent of the engine."""

from __future__ import annotations

from adapters.contract import Processor
from adapters.processors.bias import LogitBias
from adapters.processors.cite_from_prompt import CiteFromPrompt
from adapters.processors.dry import Dry
from adapters.processors.forcing import ForcedPrefix, ForcedSequence, ForceLastPhrase
from adapters.processors.grammar import Choice, Grammar, JsonSchema, Regex
from adapters.processors.guidance import Cfg, Contrastive
from adapters.processors.length import ExponentialDecayLength, GenLength, MinTokens
from adapters.processors.masks import AllowedTokens, BadWords, BannedTokens
from adapters.processors.multiple_choice import MultipleChoice
from adapters.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from adapters.processors.phrase_ban import PhraseBan
from adapters.processors.repetition import LoopStop, NoRepeatNgram
from adapters.processors.scripts import BanScripts
from adapters.processors.sequence_bias import SequenceBias
from adapters.processors.stochastic import Mirostat, Xtc
from adapters.processors.structural import StructuralTag
from adapters.processors.synthid import SynthId
from adapters.processors.thinking import ThinkingBudget
from adapters.processors.tool_calls import ToolCalls
from adapters.processors.trigger_phrase import TriggerPhrase
from adapters.processors.truncation import (
    DynamicTemperature,
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    Temperature,
    TopA,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
)
from adapters.processors.watermark import Watermark

__all__ = [
    "BUILTINS",
    "AllowedTokens",
    "BadWords",
    "BanScripts",
    "BannedTokens",
    "Cfg",
    "Choice",
    "CiteFromPrompt",
    "Contrastive",
    "Dry",
    "DynamicTemperature",
    "EpsilonCutoff",
    "EtaCutoff",
    "ExponentialDecayLength",
    "ForceLastPhrase",
    "ForcedPrefix",
    "ForcedSequence",
    "FrequencyPenalty",
    "GenLength",
    "Grammar",
    "JsonSchema",
    "LogitBias",
    "LoopStop",
    "MinP",
    "MinTokens",
    "Mirostat",
    "MultipleChoice",
    "NoRepeatNgram",
    "PhraseBan",
    "PresencePenalty",
    "Regex",
    "RepetitionPenalty",
    "SequenceBias",
    "StructuralTag",
    "SynthId",
    "Temperature",
    "ThinkingBudget",
    "ToolCalls",
    "TopA",
    "TopK",
    "TopNSigma",
    "TopP",
    "TriggerPhrase",
    "TypicalP",
    "Watermark",
    "Xtc",
]

BUILTINS: tuple[type[Processor], ...] = (
    # guidance
    Cfg,
    Contrastive,
    # bias
    LogitBias,
    SequenceBias,
    # penalties
    RepetitionPenalty,
    FrequencyPenalty,
    PresencePenalty,
    Dry,
    # soft
    CiteFromPrompt,
    GenLength,
    ExponentialDecayLength,
    # hard masks
    AllowedTokens,
    BannedTokens,
    BadWords,
    PhraseBan,
    BanScripts,
    NoRepeatNgram,
    MinTokens,
    MultipleChoice,
    JsonSchema,
    Regex,
    Choice,
    Grammar,
    StructuralTag,
    ToolCalls,
    # forcing
    ForcedSequence,
    ForcedPrefix,
    ForceLastPhrase,
    TriggerPhrase,
    LoopStop,
    ThinkingBudget,
    # temperature, truncation, sampling
    Temperature,
    DynamicTemperature,
    TopK,
    TopP,
    MinP,
    TopA,
    TypicalP,
    TopNSigma,
    EpsilonCutoff,
    EtaCutoff,
    Xtc,
    Mirostat,
    Watermark,
    SynthId,
)
"""Every built-in, in the order law's order and within a stage in the order of the documentation."""
