// Package fair shares among users what is scarce, so that one user cannot take all of it. A
// [Queue] gives turns to users who wait. A [Pool] divides an amount, such as memory, and a user who
// asks for too much waits. A [Limit] divides the places of a table, and refuses.
package fair
