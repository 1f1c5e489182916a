// Package kubernetes tests the CSI driver with real mounts, and the manifests of deploy/kubernetes.
//
// It is a module for itself: the tests need csi-sanity, Helm and the types of Kubernetes, which
// need many modules. Nothing else in the project needs them. "make test" runs the tests of both
// modules.
//
// Each test runs in its own process, network namespace and mount namespace, which play the node.
// The daemon and the driver have further mount namespaces, as their containers have in Kubernetes:
// the directory of kubelet is shared between all of them (Bidirectional propagation), and
// everything else is private. A pod has a mount namespace that receives mounts (HostToContainer).
package kubernetes
