# SPDX-License-Identifier: Apache-2.0
"""What the owner of a cache does with it; ``tools.logits_cache`` is the command line.

What all begin with: ``cache_files`` lists a cache, ``inventory`` reads what its shards say,
``coverage`` counts samples, ``sample_rows`` reads given ones in any layout. ``command_line``,
``progress``, ``processes``, ``strips`` and ``quantiles`` are what they share.

By verb: ``description`` (info), ``one_sample`` (show), ``report/`` (report), ``verification``,
``payload_verification``, ``value_checks`` and ``verification_state`` (verify), ``repair_plan``,
``regeneration`` and ``repair`` (repair), ``conversion``, ``entry_change``, ``regrouping`` and
``source_rows`` (convert), ``row_comparison`` and ``cache_comparison`` (diff), ``dump_plan``,
``payload_sizes`` and ``synthetic_rows`` (plan), ``imports/`` (prompts, import).
"""
