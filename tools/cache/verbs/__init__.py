# SPDX-License-Identifier: Apache-2.0
"""One module for each verb of ``tools.logits_cache``: its flags, and what it prints.

Each has ``add_parser(verbs)``, which adds the verb's parser and sets ``run`` to a function that
takes the parsed options and returns the exit status. What a verb computes lies in ``tools.cache``.
"""
