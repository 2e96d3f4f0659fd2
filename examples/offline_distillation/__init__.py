# SPDX-License-Identifier: Apache-2.0
"""Offline distillation from end to end on real text, on any machine.

``quickstart`` is the entry: ``recipe`` says which jobs run with which flags, ``stages`` runs them
one after the other and resumes, ``corpus`` makes the text, ``megatron_log`` reads the trainer's
log, ``report`` makes table and picture.
"""
