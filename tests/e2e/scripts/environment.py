"""Prints the environment that torchrun promises, as JSON, from rank 0; exits at once."""

import json
import os

NAMES = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS"
).split()
if os.environ["RANK"] == "0":
    print(json.dumps({name: os.environ.get(name) for name in NAMES}), flush=True)
