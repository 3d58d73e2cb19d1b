"""A child for the tests that does what its requests say."""

import os
import resource
import time
from collections.abc import Mapping
from typing import Any

from autotile.workers.child import Stage, serve


def handle(message: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    stage("begin")
    match message["do"]:
        case "echo":
            print("noise on standard output")
            os.write(1, b"noise from a C library\n")
            return {"echo": message["value"]}
        case "hang":
            stage("hang")
            time.sleep(60)
        case "last":
            return {"bye": True, "last": True}
        case "raise":
            raise RuntimeError("an unexpected fault")
        case "limits":
            return {
                "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
                "file": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
            }
        case "pid":
            return {"pid": os.getpid()}
    return {}


if __name__ == "__main__":
    serve(handle)
