// Package chart tests the Helm chart and the manifests of deploy/kubernetes: the plain manifests are
// what the chart renders, and all are valid objects of Kubernetes.
//
// It is a module for itself, because Helm and the types of Kubernetes take minutes to compile.
// "make test-chart" runs the tests. Run it after a change in deploy/kubernetes.
package chart
