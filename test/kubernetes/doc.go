// Package kubernetes tests the CSI driver with real mounts.
//
// It is a module for itself, because nothing else in the project needs csi-sanity. "make test" runs
// its tests. Package test/chart tests the manifests.
//
// Each test runs in its own process, network namespace and mount namespace, which play the node.
// The daemon and the driver have further mount namespaces, as their containers have in Kubernetes:
// the directory of kubelet is shared between all of them (Bidirectional propagation), and
// everything else is private. A pod has a mount namespace that receives mounts (HostToContainer).
package kubernetes
