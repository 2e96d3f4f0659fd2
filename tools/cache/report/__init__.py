# SPDX-License-Identifier: Apache-2.0
"""What ``report`` shows of a cache: statistics of a sample of its payloads, and a page with plots.

``statistics`` and ``histogram`` are pure and mergeable, ``survey`` reads payloads side by side,
``contents`` puts the page together: ``mass_charts``, ``teacher_charts``, ``run_charts`` and
``coverage_picture`` are its pictures, drawn by ``svg``, and ``page`` is its HTML.
"""
