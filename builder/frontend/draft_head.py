"""Heads: drafts that read a target's hidden states, and write hidden states of their own."""

from __future__ import annotations

from .eagle3_head import EagleCheckpoint, EagleHead
from .mtp_head import MtpCheckpoint, MtpHead

DraftHead = EagleHead | MtpHead
HeadCheckpoint = EagleCheckpoint | MtpCheckpoint
