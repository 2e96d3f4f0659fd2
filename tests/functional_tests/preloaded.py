# SPDX-License-Identifier: Apache-2.0
"""What the process that ranks are forked from imports: the trainer, in CPU mode."""

import os

from runtime.bootstrap import prepare_process

_found = dict(os.environ)

prepare_process(["--distributed-backend", "gloo"])

PREPARED = {name: value for name, value in os.environ.items() if _found.get(name) != value}
"""The environment variables that CPU mode gives a default."""

import pretrain_common as pretrain_common
