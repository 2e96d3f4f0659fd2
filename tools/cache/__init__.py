# SPDX-License-Identifier: Apache-2.0
"""What the owner of a cache does with it; ``tools.logits_cache`` is the command line.

``conversion`` writes a shard again in another format, and ``converted_cache`` all shards of a
directory, in processes side by side.
"""
