#pragma once  // NVRTC has clock built in
#include <stddef.h>
