#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <string_view>
namespace detail {
HELPERS}
struct Row { std::int64_t A, B, C; bool P; std::string_view L; double X; };
int main() {
    for (const Row& row : {ROWS}) {
PRINTED
    }
}
