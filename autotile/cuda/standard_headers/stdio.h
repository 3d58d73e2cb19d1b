#pragma once  // NVRTC has printf built in
#include <stddef.h>
