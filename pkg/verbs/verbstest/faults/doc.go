// Package faults breaks things on purpose.
package faults
