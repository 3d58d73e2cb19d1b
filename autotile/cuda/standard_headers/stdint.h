#pragma once  // the types are those that cuda/std declares for NVRTC, which takes long to compile in some versions
#include <limits.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef signed char int_fast8_t;
typedef unsigned char uint_fast8_t;
typedef signed char int_least8_t;
typedef unsigned char uint_least8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef short int_fast16_t;
typedef unsigned short uint_fast16_t;
typedef short int_least16_t;
typedef unsigned short uint_least16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef int int_fast32_t;
typedef unsigned int uint_fast32_t;
typedef int int_least32_t;
typedef unsigned int uint_least32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef long long int_fast64_t;
typedef unsigned long long uint_fast64_t;
typedef long long int_least64_t;
typedef unsigned long long uint_least64_t;
typedef int64_t intptr_t;
typedef uint64_t uintptr_t;
typedef int64_t intmax_t;
typedef uint64_t uintmax_t;
#ifndef INT8_MIN
#define INT8_MIN SCHAR_MIN
#endif
#ifndef INT8_MAX
#define INT8_MAX SCHAR_MAX
#endif
#ifndef UINT8_MAX
#define UINT8_MAX UCHAR_MAX
#endif
#ifndef INT16_MIN
#define INT16_MIN SHRT_MIN
#endif
#ifndef INT16_MAX
#define INT16_MAX SHRT_MAX
#endif
#ifndef UINT16_MAX
#define UINT16_MAX USHRT_MAX
#endif
#ifndef INT32_MIN
#define INT32_MIN INT_MIN
#endif
#ifndef INT32_MAX
#define INT32_MAX INT_MAX
#endif
#ifndef UINT32_MAX
#define UINT32_MAX UINT_MAX
#endif
#ifndef INT64_MIN
#define INT64_MIN LLONG_MIN
#endif
#ifndef INT64_MAX
#define INT64_MAX LLONG_MAX
#endif
#ifndef UINT64_MAX
#define UINT64_MAX ULLONG_MAX
#endif
#ifndef SIZE_MAX
#define SIZE_MAX UINT64_MAX
#endif
#ifndef INTPTR_MAX
#define INTPTR_MAX INT64_MAX
#endif
#ifndef UINTPTR_MAX
#define UINTPTR_MAX UINT64_MAX
#endif
#ifndef INTMAX_MAX
#define INTMAX_MAX INT64_MAX
#endif
#ifndef UINTMAX_MAX
#define UINTMAX_MAX UINT64_MAX
#endif
#ifndef INT64_C
#define INT64_C(x) x##LL
#endif
#ifndef UINT64_C
#define UINT64_C(x) x##ULL
#endif
#ifndef INT32_C
#define INT32_C(x) x
#endif
#ifndef UINT32_C
#define UINT32_C(x) x##U
#endif
