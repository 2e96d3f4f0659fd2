# SPDX-License-Identifier: Apache-2.0
"""Makes a cache of the log-probabilities that an inference server returned for prompts.

``server_formats`` reads a line, ``top_entries`` makes a sample's targets of it, ``line_index`` goes
through the files, ``training_samples`` asks Megatron which tokens each sample has, ``matching``
brings the two together by content, and ``shard_import`` writes a shard.
"""
