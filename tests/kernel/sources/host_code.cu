void run(std::vector<float>& v);
static double seconds() { return 0; }
template <typename T> void launch(T* x) { k<4><<<1, 32>>>(x, P{1}); }
int main(int argc, char** argv)
{
    std::vector<float> h(10); /* } */
    std::cout << "}" << '}' << std::endl; // }
    return 0;
}
inline std::vector<float> make(int n = 3) { return std::vector<float>(n); }
