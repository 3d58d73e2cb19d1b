#pragma once  // NVRTC has assert built in
