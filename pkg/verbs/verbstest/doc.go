// Package verbstest holds the conformance suite that every provider must pass: [Conformance].
package verbstest
