# SPDX-License-Identifier: Apache-2.0
"""What reading a cache will ask of store, network and hosts, predicted without a cluster.

``setting`` says what is read by whom from where; ``member_needs`` which members each reader needs;
``simulation`` plays readers and trainer against the store, which is ``shared_store`` behind the
``shard_streams`` of each reader; ``prediction`` puts together what comes of it, and ``table`` shows
it. Nothing here imports torch or the trainer. ``tools.logits_load_plan`` is the command line.
"""
