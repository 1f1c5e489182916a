//go:build !race

package xprt

const raceDetector = false
