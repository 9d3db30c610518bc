"""Recorded traffic: requests as token ids in a folder of compressed files, for `tune` and replays."""

from autospec.traffic.manifest import Manifest
from autospec.traffic.reader import Damage, TrafficReader
from autospec.traffic.recording import Traffic
from autospec.traffic.request import FollowUp, TrafficRequest
from autospec.traffic.writer import ShardWriter, TrafficFullError

__all__ = [
    "Damage",
    "FollowUp",
    "Manifest",
    "ShardWriter",
    "Traffic",
    "TrafficFullError",
    "TrafficReader",
    "TrafficRequest",
]
