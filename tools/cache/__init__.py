# SPDX-License-Identifier: Apache-2.0
"""What the owner of a cache does with it; ``tools.logits_cache`` is the command line.

``conversion`` writes a shard again in another format, and ``converted_cache`` all shards of a
directory, in processes side by side. ``cache_files`` and ``inventory`` are what every verb begins
with, and ``coverage`` counts its samples.

``payload_verification`` reads payloads (``verify_cache`` all that are asked for, with
``verification_state`` to go on from) and ``value_checks`` judges their numbers; ``verification``
tells what is wrong with a cache and what is lost, ``regeneration`` how that is dumped again,
``repair_plan`` what is set aside, and ``repair`` does it.
"""
