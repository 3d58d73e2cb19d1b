#pragma once  // NVRTC has memcpy and memset built in
#include <stddef.h>
