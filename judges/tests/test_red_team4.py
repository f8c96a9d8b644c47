# ruff: noqa: RUF001
r"""What a fourth red team and a third round of reports from other systems found, by the names of their reports.

A line of a table is `gold <- answer | answer`, as in test_hostile_math.py.
"""

import itertools
import random

import pytest
from code_jobs import ISOLATIONS, job, make_pool, outcomes
from test_hostile_math import cases
from written_otherwise import KINDS

from judges.math import equal, grade

RIGHT = {
    "H3": r"""
-1 <- I^2 | e^{I\pi} | -8I <- (2I)^3 | 3-4I <- 3+4I^3 | 3-4i <- 3-4I | I <- I^5 | I_1+I_2 <- I_2+I_1 | PI^2R <- RPI^2
x^2+1 <- (x+I)(x-I) | \frac{1-I}{2} <- \frac{1}{1+I}""",
    "H4": r"""
|x^2-5x+6| <- |x-2||x-3| | |5x-6-x^2| | \sqrt{(x^2-5x+6)^2} | \sqrt{(x-5)^2(x-9)^2} <- |x-5||x-9| | |x-200| <- |200-x|
||x|-3| <- |3-|x|| | \sqrt[4]{(x-6)^4} <- |x-6| | |xy-1| <- |1-xy| | \ln|x-40| <- \frac12\ln((x-40)^2) | |x|^2 <- x^2
\max(x,5) <- \frac{x+5+|x-5|}{2} | \sqrt{xy} <- \sqrt x\sqrt y""",
    "H5": r"""
(3,-4) <- y=-4, x=3 | x=3, y=-4 | (y,x)=(-4,3) | y=-4 \text{ and } x=3 | (1,-2,5) <- z=5, y=-2, x=1
(4,1) <- n=1, m=4
5, 9 <- b=9, a=5 | (10,20) <- x_2=20, x_1=10 | (3,\frac{\pi}{4}) <- r=3, \theta=\frac{\pi}{4} | y=7, x=2 <- (2,7)
5, 6 <- length: 5, width: 6""",
    "M2": r"""
(x-1)^2+(y+2)^2=9 <- x^2+y^2-2x+4y-4=0 | x^2-2x+y^2+4y-4=0 | (x-\sqrt2)^2+y^2=3 <- x^2+y^2-2\sqrt2x-1=0
(x+1)^2+(y-5)^2+(z-2)^2=16 <- x^2+y^2+z^2+2x-10y-4z+14=0 | \frac{x^2}{9}+\frac{y^2}{4}=1 <- 4x^2+9y^2-36=0""",
    "M3 wide": r"""
(3,-4) <- （3，-4） | （３，－４） | 1,2,3 <- 1，2，3 | 1、2、3 | 25\% <- 25％ | 42 <- 42。 | ４２． | x\le 5 <- x≤５
x>2 \text{ or } x<1 <- x>2或x<1""",
    "M3 vulgar": r"""
3/4 <- ¾ | 3.5 <- 3½ | 3 ½ | -1/3 <- -⅓ | \frac{x}{2} <- ½x | \frac37 <- ³⁄₇ | 1.5 \text{ hours} <- 1½ hours""",
    "M3 fonts": r"""
5 cm <- 5{\rm cm} | 5\,{\rm cm} | 5\rm{cm} | 5 {\rm{cm}} | 42 <- \bm{42} | \texttt{42} | {\bf 42} | \text{\textbf{42}}
42 <- {\color{blue}42} | \texttt{42.} | \frac12 <- {\rm \frac{1}{2}} | \frac{\bm 1}{\bm{2}}
x_{max} <- x_{\rm max}""",
    "M3 ratio of units": r"""
60 km/h <- 60\frac{km}{h} | 60\,\frac{\text{km}}{\text{h}} | 60 \frac{\rm km}{\rm h} | 9.8 m/s^2 <- 9.8\frac{m}{s^2}
9.8 m/s^2 <- 9.8\,\frac{\text{m}}{\text{s}^2} | 60\frac{km}{h} <- 60 | 5\frac{m}{s} <- \frac{5m}{s}""",
    "M3 rows": r"""
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}
\begin{pmatrix}1&2\cr3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \left(\begin{array}{c c}1&2\\3&4\end{array}\right) | \pmatrix{1&2\cr3&4}
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \left(\begin{smallmatrix}1&2\\3&4\end{smallmatrix}\right)
-2 <- \left|\begin{matrix}1&2\\3&4\end{matrix}\right|""",
    "M3 signs": r"""
x<1 \text{ or } x>2 <- x\lt 1 \text{ or } x\gt 2 | x\le 3 <- x ⩽ 3 | x\ge 3 <- x ⩾ 3 | \emptyset <- ∅
\{1,2\} <- \lbrace 1,2\rbrace | \mathbb{R} <- \u211d""",
    "M3 unions": r"""
1, 2, 3 <- \{1,2\}\cup\{3\} | {1,2}\cup{3} | \{1,2,3\} <- \{3\}\cup\{1\}\cup\{2\} | \{1,2\}\cup\{3\} <- 1, 2, 3
x\in\{1,2,3\} <- x\in\{1\}\cup\{2,3\} | (-\infty,0)\cup\{1\} <- \{1\}\cup(-\infty,0)""",
    "M3 tuples": r"""
(3,-4) <- P(3,-4) | P_1\left(3,\,-4\right) | \begin{cases}x=3\\y=-4\end{cases} | \begin{cases}y=-4,\\x=3.\end{cases}
(3,-4) <- \left\{\begin{array}{l}x=3\\y=-4\end{array}\right. | (1,2),(3,4) <- A(1,2), B(3,4) | A(3,-4) <- (3,-4)""",
    "M3 intervals": r"""
(2,5] <- x>2 \text{ and } x\le5 | x\le 5 \land 2<x | \begin{cases}x>2\\x\le5\end{cases}
2<x\le5 <- x\le5 \text{ and } x>2
x>2 \text{ and } x<6 <- (2,6)""",
    "M3 graphs": r"y=2x+3 <- f(x)=2x+3 | g(x)=3+2x | f(x)=x^2+1 <- y=x^2+1 | y'=2x <- f'(x)=2x",
    "sieval_26": r"""
2n-3 <- 2n-3 \text{ for all } n \ge 3 | 2n-3, n\geq 3 | 2n-3 \text{ for all integers } n \ge 3
cx <- cx \text{ for some constant } c
\frac{1}{x-2} <- \frac{1}{x-2} \text{ for } x \ne 2 | 2n-3 \text{ for all } n \ge 3 <- 2n-3 | 2n-3, n\ge 3""",
    "L2": r"60 km/h <- 60 kmh | 60 kph | 60 km h^{-1} | 5 <- 5 canteens | 5 boats",
    "29-22 indices": r"""
x_1=3 <- x_{1}=3 | x₁=3 | x_{ 1 } = 3 | x_ 1=3 | 3 | x_1=2, x_2=3 <- x_{1}=2, x_{2}=3 | x₁=2, x₂=3 | x₂=3, x₁=2
x_1=2, x_2=3 <- 2, 3 | x_{2}=3 \text{ and } x_{1}=2
x_{1}=2, x_{2}=3 <- x_1=2,x_2=3 | x₁ = 2, x₂ = 3 | 2x_1 <- x_{1}\cdot 2 | 2x₁ | x_{12} <- x₁₂ | x_{ 12 }
a_n=2n+1 <- a_{n}=2n+1 | aₙ=2n+1 | 2n+1 | (x_1,y_1)=(2,3) <- (x_{1},y_{1})=(2,3) | (2,3) | (x₁, y₁) = (2, 3)
x_1<3 <- x_{1}<3 | x₁ < 3 | \log_2 5 <- \log_{2} 5 | \log_{2}{5} | log₂5 | 255_{10} <- 255_10 | 255
S_n=n^2 <- S_{n}=n^2 | P_1(3,-4) <- P_{1}(3,-4) | P₁(3,-4)
x_{max} <- x_{\text{max}} | x_{\mathrm{max}} | \int_0^1 x\,dx <- \int_{0}^1 x dx
C_1e^x+C_2e^{-x} <- C_{1}e^{x}+C_{2}e^{-x} | C₁e^x+C₂e^{-x}
C_1e^x+C_2e^{-x} <- C_{1}e^x+C_{2}e^{-x}, where C_{1} and C_{2} are constants
C_1e^x+C_2e^{-x} <- C_1e^x+C_2e^{-x}, \text{ where $C_1$ and $C_2$ are constants}
C_1e^x+C_2e^{-x} <- C_1e^x+C_2e^{-x} \text{ where } C_{1}, C_{2} \text{ are arbitrary constants}
Ae^x <- Ae^x \text{ where $A$ is a constant} | Ae^x, where $A$ is a constant | 3k+1 <- 3k+1 \text{ for all $k$}
3k+1 <- 3k+1 \text{ where $k \in \mathbb{Z}$} | 3k+1, \text{where $k$ is an integer} | 5, 6 <- $5$ and $6$
5, 6 <- $5$, $6$ | $5 and $6""",
    "29-22 greek": r"""
\lambda_1=2, \lambda_2=3 <- λ₁=2, λ₂=3 | \lambda_{1}=2, \lambda_{2}=3 | λ_1 = 2, λ_2 = 3 | 2, 3
\lambda_1 = 5 <- 5 | λ₁ = 5 | λ = 5 <- \lambda=5 | 5
\mu <- μ | µ | \eta <- η | \nu <- ν | \zeta <- ζ | \kappa <- κ | \chi <- χ | \xi <- ξ | \Delta <- Δ | \Omega <- Ω
\Sigma <- Σ | \Gamma <- Γ | \Theta <- Θ | \Lambda <- Λ | \Xi <- Ξ | \Pi <- Π | \Phi <- Φ | \Psi <- Ψ
\Upsilon <- Υ | \iota <- ι | \upsilon <- υ | \omega <- ω | \psi <- ψ | \tau <- τ | \sigma <- σ | ς | \varsigma
\phi <- φ | ϕ | \varphi | \varphi <- \phi | φ | ϕ | \epsilon <- ε | ϵ | \varepsilon | \varepsilon <- ε | \epsilon
\theta <- θ | ϑ | \vartheta | \rho <- ρ | ϱ | \varrho | \kappa <- ϰ | \sigma^2 <- σ² | \chi^2 <- χ²
2\mu+1 <- 1+2μ | 2μ + 1 | \Delta x <- Δx | \frac{\mu}{\sigma} <- μ/σ | \mu=3 <- μ = 3 | 3
\mu=3, \sigma=2 <- μ=3, σ=2 | σ=2, μ=3 | \Delta=b^2-4ac <- Δ = b² - 4ac | b^2-4ac | \gamma <- γ | 2\gamma+1 <- 1+2γ
24 <- \Gamma(5) | \alpha+\beta <- β+α | α + β | \phi(n) <- φ(n)
2x <- 2𝑥 | 𝟐𝐱 | 5 <- 𝟓 | \alpha <- 𝛼 | x' <- x′ | x^{\prime} | y''=2y <- y″=2y | e^{i\theta} <- e^{iθ} | x_i <- xᵢ
x_n+x_m <- xₙ+xₘ
5 μm <- 5 | 5 μm | 5 µm | 5 <- 5 Ω | 5 ohms <- 5 Ω | 5 Ω <- 5 | 5 ohms""",
    "29-22 times": r"""
3:45 <- 3 : 45 | 3\!:\!45 | 3\text{:}45 | 3{:}45 | 3\colon 45 | 3: 45 | 3\,:\,45 | 3\mathord{:}45
3:45 PM <- 3 : 45 PM | 3\!:\!45 \text{ p.m.} | 3\text{:}45 pm | 3{:}45\text{ PM} | \text{3:45 P.M.} | 3 : 45 p.m.
3:45 PM <- 3:45 p. m. | 2:3 <- 2 : 3 | 2\!:\!3 | 2{:}3 | 2\text{ : }3 | 2\colon 3 | 1:2:3 <- 1 : 2 : 3
1:2:3 <- 1\!:\!2\!:\!3 | 1\colon2\colon3 | a:b <- a : b | a\colon b""",
    "29-22 sets": r"""
\mathbb{R}\setminus\{3\} <- \text{x is all real numbers except 3} | x \text{ is all real numbers except } 3
\mathbb{R}\setminus\{3\} <- \text{all real numbers except } x=3 | x \ne 3 | x = \text{all real numbers except } 3
\mathbb{R}\setminus\{3\} <- \text{all reals except 3} | \text{the set of all real numbers except 3}
\mathbb{R}\setminus\{3\} <- x \text{ can be all real numbers except } 3 | \text{All real numbers except 3.}
\mathbb{R} <- \text{x is all real numbers} | x \text{ is any real number} | \text{any real number}
\mathbb{R} <- x \in \text{all real numbers} | \text{the set of all real numbers}""",
}
WRONG = {
    "H3": r"""
3-4i <- 3-4I^2 | 3-4I^3 | 3-4I^4 | I <- I^3 | I_2 | 1 <- I^2 | P=I^2R <- P=IR | P=-R | P=I^3R | I_1 <- I_2
\frac12LI^2 <- \frac12LI | -\frac12L""",
    "H4": r"""
|x^2-5x+6| <- x^2-5x+6 | |x-2|(x-3) | x^2-5x+6 <- |x-2||x-3| | \sqrt{(x-5)^2(x-9)^2} <- (x-5)(x-9) | |x-200| <- 200-x
|x-200| <- x-200 | |x+350| <- x+350 | ||x-300|-1| <- |x-300|-1 | |(x-150)(x-150.5)| <- (x-150)(x-150.5) | |a-b| <- b-a
\ln|x-218| <- \ln(218-x) | \ln(x-218) | |e^x-50| <- 50-e^x | \frac{|x-60|}{x-60} <- -1 | y=|x-90| <- y=90-x
|x-80|+|y-80|=1 <- 160-x-y=1 | \begin{pmatrix}|x-70|\\1\end{pmatrix} <- \begin{pmatrix}70-x\\1\end{pmatrix}
\max(x,500) <- 500 | \arcsin(\sin x) <- x""",
    "H5": r"""
(3,-4) <- y=3, x=-4 | x=-4, y=3 | (y,x)=(3,-4) | (1,-2,5) <- z=1, y=-2, x=5 | 5, 9 <- b=5, a=9
(10,20) <- x_2=10, x_1=20
(3,5) <- m=3, b=5 | y=7, x=2 <- (7,2) | 5, 6 <- width: 5, length: 6""",
    "M2": r"""
(x-1)^2+(y+2)^2=9 <- x^2+y^2-2x+4y-5=0 | x^2+y^2+2x+4y-4=0 | (x-\sqrt2)^2+y^2=3 <- x^2+y^2-2\sqrt2x+1=0
(x+1)^2+(y-5)^2+(z-2)^2=16 <- x^2+y^2+z^2+2x-10y-4z+15=0""",
    "M3 wide": r"(3,-4) <- （3，4） | （-4，3） | 1,2,3 <- 1，2 | 1，2，4 | 12 <- 1，2 | 1。2 | 3:4 <- 4：3",
    "M3 vulgar": r"3/4 <- ¼ | 3¼ | 3.5 <- 3¼ | 3·½ | ½3 | 2½",
    "M3 fonts": r"5 cm <- 5{\rm mm} | 5{\rm cm}^2 | 6{\rm cm} | 42 <- \bm{24} | \texttt{4}2\texttt{2}",
    "M3 ratio of units": r"""
60 km/h <- 60\frac{h}{km} | 60\frac{mi}{h} | 60\frac{km}{h^2} | 61\frac{km}{h} | 5\frac{m}{s} <- 5
2\frac{x}{y} <- \frac{2y}{x}""",
    "M3 rows": r"""
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \begin{pmatrix}1&2\\[4pt]4&3\end{pmatrix}
\begin{pmatrix}1&2\\[4pt]\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} <- \left|\begin{matrix}1&2\\3&4\end{matrix}\right|
\begin{matrix}1\\2\cr3\cr4\end{matrix}""",
    "M3 signs": r"""
x<1 \text{ or } x>2 <- x\gt 1 \text{ or } x\lt 2 | x\le 3 <- x ⩾ 3 | \emptyset <- \{0\}
\{1,2\} <- \lbrace 1,3\rbrace""",
    "M3 unions": r"""
1, 2, 3 <- \{1,2\}\cup\{4\} | \{1\}\cup\{2\} | \{1,2\}\cap\{3\} | \{1,2\} \cup (3,4) | (1,2) <- \{1\}\cup\{2\}""",
    "M3 tuples": r"""
(3,-4) <- P(-4,3) | P(3,4) | P(3,-4), Q(1,2) | \begin{cases}x=-4\\y=3\end{cases} | B(3,-4) <- A(3,-4)
C(6,3) <- (6,3)
20 <- C(6,3) | f(2,3) <- (2,3)""",
    "M3 intervals": r"""
(2,5] <- x>2 \text{ or } x\le5 | x>2 \text{ and } x<5 | x>2 \text{ and } y\le5 | x>5 \text{ and } x\le2 | x>2
x>2 \text{ and } x\le6
(2,1) <- x>2 \text{ and } x<1""",
    "M3 graphs": r"""
y=2x+3 <- f(x)=2x+4 | f(t)=2t+3 | f'(x)=2x+3 | x=2x+3 | f(x)=x^2+1 <- g(x)=x^2+1 | y=5 <- f(2)=5""",
    "sieval_26": r"""
2n-3 <- 2n-1 \text{ for all } n \ge 3 | 2n-3 \text{ for all } n \ge 3 <- 2n-3 \text{ for all } n \ge 4
5 <- 5 \text{ if } n \ge 3
cx <- bx \text{ for some constant } b | n \ge 3 <- 2n-3, n\ge 3""",
    "L2": r"""
60 km/h <- 60 kmh^2 | 60 kmh^{-1} | 60 mph <- 60 mph^{-1} | 5 <- 5 thirteens | 5 braces | 5 quadruples
5 deuces""",
    "29-22 indices": r"""
x_1=3 <- x_2=3 | x_{2}=3 | x1=3 | x_{11}=3 | x_{12} <- x_12 | x_{1}2 | x_1 | x_{21} | 2x_1 <- 2x_2 | x_1^2 | 21
a_n=2n+1 <- a_{n+1}=2n+1 | a_{m}=2n+1 | x_1=2, x_2=3 <- x_{1}=3, x_{2}=2 | x₁=3, x₂=2 | x_1 <- x^1 | x | x1
\log_2 5 <- \log_{25} | \log_{5}2 | \log_{2}6 | x_{1}=2 <- x_{2}=2 | 12_{7} <- 12_8 | C_1e^x <- C_2e^x | C_{2}e^x
C_1x <- C_1x^2, where $C_1$ is a constant | Ae^x <- Be^x, where $B$ is a constant | x_{ab} <- x_ab
5, 6 <- $5$ and $7$""",
    "29-22 greek": r"""
\mu <- u | m | \nu | μ_1 | ν | \nu <- v | \chi <- x | X | \eta <- n | η_1 | \kappa <- k | \rho <- p | \omega <- w
\Delta <- δ | A | D | \Omega <- ω | O | \Sigma <- σ | \Pi <- π | \pi | \Gamma <- γ | \gamma | \gamma <- Γ | \Gamma
2\gamma+1 <- 2\Gamma+1 | 2Γ+1 | 2.15 | \gamma_1 x <- \gamma_2 x | \gamma x | \gamma_1 <- \gamma_2 | \phi <- ψ | Φ
\phi <- \Phi | \epsilon <- e | E | \in | \theta <- Θ | \lambda_1=2 <- λ₂=2 | \lambda_2=2 | \mu_1=2
\lambda_1=2, \lambda_2=3 <- λ₁=3, λ₂=2 | \sigma <- ς_1 | s | \xi <- ζ | \alpha <- a | α_1 | \upsilon <- u
\iota <- i | \pi <- ϖ | \varpi | 3.14 | 2x <- 𝟑𝐱 | 2𝑦 | x' <- x | x″ | 5 μm <- 5 mm | 5 m | 5 Ω <- 5 V | 6 Ω
\sum_{k=1}^n k <- Σ""",
    "29-22 times": r"""
3:45 <- 3 : 54 | 3\!:\!46 | 345 | 3.45 | 3\text{:}54 | 4{:}45 | 3:45 PM <- 3 : 45 AM | 3\!:\!45 \text{ a.m.}
3:45 PM <- 4 : 45 PM | 2:3 <- 3\!:\!2 | 3\text{:}2 | 2\colon 4 | 2/3 | 23 | 1:2:3 <- 1\!:\!3\!:\!2 | 1\colon2""",
    "29-22 sets": r"""
\mathbb{R}\setminus\{3\} <- \text{x is all real numbers} | \text{x is all real numbers except 4}
\mathbb{R}\setminus\{3\} <- \text{x is all real numbers except 3 and 4} | \text{x is all integers except 3}
\mathbb{R}\setminus\{3\} <- x \text{ is } 3 | \text{all real numbers except } i | x=3
\mathbb{R} <- \text{x is all real numbers except 3} | \text{x is all integers} | \text{x is real or 3}
3 <- \text{all real numbers except 3}""",
    "29-22 domains": r"""
\alpha x <- \alpha x^2 where a is a constant | \sin x, where s is a constant <- \sin 2x""",
}
THOUGHTS = [  # (reply, gold, outcome)
    (r"<think>Perhaps \boxed{12}.</think>I do not know.", "12", "parse_fail"),
    (r"<think>\boxed{5}</think>The answer is 12.", "12", "ok"),
    ("\\boxed{5}</think>\n\nThe answer is 12.", "12", "ok"),
    (r"<think>\boxed{5}</think>It is \boxed{12}.", "12", "ok"),
    (r"<think>\boxed{12}</think>It is \boxed{5}.", "12", "wrong"),
    ("<think>Answer: 12</think>", "12", "parse_fail"),
    (r"[THINK]\boxed{12}[/THINK]No.", "12", "parse_fail"),
    (r"<think>a</think>\boxed{12} <think>No, \boxed{5}.</think> #### 7", "7", "ok"),
    (r"<think>It is \boxed{12}", "12", "ok"),  # not closed
]
CHINESE = [  # M3
    ("答案：42", "42", "ok"),
    ("所以答案是 $42$。", "42", "ok"),
    ("【答案】42", "42", "ok"),
    ("**答案**：（3，-4）。", "(3,-4)", "ok"),
    ("## 答案\n42", "42", "ok"),
    ("答案是42，因为和为42。", "42", "ok"),
    ("Answer\uff1a42", "42", "ok"),
    ("\\boxed{4}\n答案：12", "12", "ok"),
    ("\\boxed{12}\n答案是较大的那个。", "12", "ok"),
    ("答案：43", "42", "wrong"),
    ("\\boxed{4}\n答案：12", "4", "wrong"),
]
ADD = {"entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 3 and f(5, -7) == -2"}
SIGNED = ADD | {"prompt": 'def add(a, b):\n    """The sum."""\n'}
READS = {"tests": [{"input": "2\n3\n", "output": "5\n"}]}
FUNCTION = "def add(a, b):\n    return a + b\n"
PROGRAM = "n = int(input())\nm = int(input())\nprint(n + m)\n"
PROSE = ["Here is the code:\n", "So a = b.\nThe class of sums: for each, we import numbers\n\n", "Solution\n\n"]
PROSE += ["y = 2 gives 3\n"]
CODES = [  # (row, reply, outcome) with prose, code and one fence behind it; with a thought
    *((ADD, f"{prose}{FUNCTION}{end}", "ok") for prose in PROSE for end in ("```", "```\nDone", "\n~~~\nIt adds.", "")),
    *((READS, f"{prose}{PROGRAM}{end}", "ok") for prose in PROSE for end in ("```\n", "```\nDone")),
    *((ADD, f"{prose}import math\n\n{FUNCTION}```", "ok") for prose in PROSE),
    *((ADD, f"{prose}{FUNCTION.replace('+', '*')}```", "wrong") for prose in PROSE),
    (SIGNED, "The body is\n\n    return a + b\n```", "ok"),
    (ADD, "Here:\ndef add(a, b) return a + b\n```", "wrong"),
    (ADD, f"<think>\n```python\n{FUNCTION}```\n</think>\nI do not know.", "wrong"),
    (ADD, f"<think>\n```python\n{FUNCTION}```\n</think>", "parse_fail"),
    (ADD, f"<think>\n```python\ndef add(a, b): return 0\n```\n</think>\nSo:\n{FUNCTION}```", "ok"),
    (READS, f"<think>{PROGRAM}</think>\nprint(5 - 1)", "wrong"),
]


@pytest.mark.parametrize("finding", RIGHT)
def test_right_answers(finding):
    assert [pair for pair in cases(RIGHT[finding]) if not equal(*pair)] == []


@pytest.mark.parametrize("finding", WRONG)
def test_wrong_answers(finding):
    assert [pair for pair in cases(WRONG[finding]) if equal(*pair)] == []


@pytest.mark.parametrize(("reply", "gold", "outcome"), THOUGHTS + CHINESE)
def test_r6_a_closed_thought_is_not_graded_and_m3_answers_of_chinese_replies(reply, gold, outcome):
    assert grade({"answer": gold, "reply": reply, "strict": False})["outcome"] == outcome


def test_r6_in_strict_mode():
    for reply, outcome in (("<think>Answer: 12</think>\nNo.", "parse_fail"), ("<think>5</think>Answer: 12", "ok")):
        assert grade({"answer": "12", "reply": reply, "strict": True})["outcome"] == outcome


@pytest.mark.skipif(not ISOLATIONS, reason="this machine has no seccomp")
def test_lm_eval_4091_prose_code_and_one_fence():
    pool = make_pool()
    found = outcomes(pool, [job(reply, row, ISOLATIONS[-1]) for row, reply, _ in CODES])
    pool.close()
    assert [case for case, outcome in zip(CODES, found, strict=True) if outcome != case[2]] == []


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.long)])
def test_generated_pairs_of_the_same_kinds(rounds):
    rng = random.Random(58)
    made = itertools.chain.from_iterable(kind(rng) for _ in range(rounds) for kind in KINDS)
    assert [pair for pair in made if equal(*pair[1:3]) != pair[3]] == []
