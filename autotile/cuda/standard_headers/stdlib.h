#pragma once  // NVRTC has malloc, free and abs built in
#include <stddef.h>
