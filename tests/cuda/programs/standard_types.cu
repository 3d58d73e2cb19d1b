static_assert(std::numeric_limits<int64_t>::min() == cuda::std::numeric_limits<int64_t>::min());
static_assert(std::numeric_limits<float>::max_digits10 == cuda::std::numeric_limits<float>::max_digits10);
static_assert(std::numeric_limits<double>::denorm_min() == cuda::std::numeric_limits<double>::denorm_min());
static_assert(std::numeric_limits<unsigned>::digits10 == cuda::std::numeric_limits<unsigned>::digits10);
static_assert(std::is_same_v<std::decay_t<const int (&)[3]>, const int*>);
static_assert(std::is_same_v<std::common_type_t<char, float>, cuda::std::common_type_t<char, float>>);
static_assert(std::is_same_v<std::make_signed_t<unsigned long>, long>);
static_assert(std::is_pointer_v<int* const> && !std::is_pointer_v<int> && std::is_function_v<void(int)>);
static_assert(std::is_signed_v<float> && !std::is_signed_v<bool> && std::is_unsigned_v<bool>);
static_assert(std::conjunction_v<std::true_type, std::is_enum<decltype(std::byte{})>>);
__global__ void k(int* x) { x[0] = std::max(x[1], 2); std::array<int, 2> a{1, 2}; x[1] = a[0]; }
