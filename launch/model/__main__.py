"""Prints the folder of the sample model, and converts the model first if that was not done yet."""

import os
import sys

from launch.errors import LaunchError
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

try:
    print(sample_model(default_cache_dir(os.environ)))
except LaunchError as error:
    sys.exit(f"error: {error}")
