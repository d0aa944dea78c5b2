"""Incremental parsers of the tool calls that models write."""

from worker.frontdoor.calls.arguments import Kinds
from worker.frontdoor.calls.parser import CallParser
from worker.frontdoor.calls.pieces import CallArguments, CallBegin, Piece, TextPiece, ThinkingPiece, joined

__all__ = ["CallArguments", "CallBegin", "CallParser", "Kinds", "Piece", "TextPiece", "ThinkingPiece", "joined"]
